#include "common/plan/plan.h"
