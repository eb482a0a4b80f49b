#include "common/base/json.h"
