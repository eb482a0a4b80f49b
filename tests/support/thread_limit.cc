#include "tests/support/thread_limit.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

namespace {

constexpr int kUnlimited = -1;
thread_local int threads_left = kUnlimited;

using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);

}  // namespace

// In place of libc's, also for libraries: the program's own symbols come first.
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*start)(void*),
                              void* argument) {
  if (threads_left == 0) return EAGAIN;
  if (threads_left > 0) --threads_left;
  static const auto create = reinterpret_cast<Create>(dlsym(RTLD_NEXT, "pthread_create"));
  return create(thread, attributes, start, argument);
}

namespace weightbroker::testing {

ThreadLimit::ThreadLimit(int threads) { threads_left = threads; }

ThreadLimit::~ThreadLimit() { threads_left = kUnlimited; }

}  // namespace weightbroker::testing
