#include "common/quant/gate.h"
