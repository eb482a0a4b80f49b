// Compiled as C++17 without exceptions: see CMakeLists.txt.
#include "tests/unit/endpoint/redeem_cxx17.h"

#include "client/include/weightbroker/redeem.h"

int RedeemFromCxx17(const char* socket_path, const void* ticket, size_t ticket_size, int* fds, size_t capacity,
                    size_t* count, int timeout_ms, char* error, size_t error_size) {
  return weightbroker::RedeemTicket(socket_path, ticket, ticket_size, fds, capacity, count, timeout_ms, error,
                                    error_size);
}
