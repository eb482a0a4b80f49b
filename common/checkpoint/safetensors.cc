#include "common/checkpoint/safetensors.h"
