#include "common/memory/host_slab.h"
