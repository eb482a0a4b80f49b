#include "common/memory/digest.h"
