#include "common/base/socket.h"
