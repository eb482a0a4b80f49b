// A machine at its limit of processes, for one thread of a test: pthread_create fails with EAGAIN there.
//
//   const ThreadLimit limit(/*threads=*/1);       // the second one from here on fails
//
// A program that links this has all its threads made through it. Other threads are not limited.
#pragma once

namespace weightbroker::testing {

class ThreadLimit {
 public:
  explicit ThreadLimit(int threads);
  ~ThreadLimit();
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;
};

}  // namespace weightbroker::testing
