#include "common/base/file.h"
