#include "common/checkpoint/dtype.h"
