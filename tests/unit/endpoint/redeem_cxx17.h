// RedeemTicket as an engine in C++17 compiles it.
#pragma once

#include <stddef.h>

int RedeemFromCxx17(const char* socket_path, const void* ticket, size_t ticket_size, int* fds, size_t capacity,
                    size_t* count, int timeout_ms, char* error, size_t error_size);
