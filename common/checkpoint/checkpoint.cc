#include "common/checkpoint/checkpoint.h"
