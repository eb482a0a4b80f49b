#include "common/plan/manifest.h"
