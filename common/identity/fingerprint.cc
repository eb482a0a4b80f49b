#include "common/identity/fingerprint.h"
