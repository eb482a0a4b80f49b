// How many reads go to storage at once, found by trying. A virtual disk was fastest with 4 MiB under way and lost a
// fifth with 16; an array of NVMe drives wants a hundred.
//
//   ReadDepth depth(/*first=*/4, /*most=*/32);
//   depth.Completed(read_bytes, SteadyNanoseconds());     // of each read; sometimes moves the limit
//   ... at most depth.limit() reads under way ...
//
// A window is long enough that each of the reads under way is replaced several times. As long as twice as many reads
// bring a tenth more bytes a second the limit doubles. Once they do not it stays, and from time to time half and twice
// as many are tried, in turn, half as often each time that they were no better: with tries as often as at first two
// cores loaded 4 GiB with 0.945 of a disk's rate, without any with 0.966. Once the rate has been less than half
// twice in a row, fewer are tried at once. What is tried must win twice, with a window at the limit that holds in
// between: one window of a virtual disk was off from the next by 8 %, and now and then by half. Never are there fewer
// than the first: noise led to one then, with which storage has nothing to do whenever a turn passes from one thread to
// another. Not thread-safe.
#pragma once

#include <cstdint>

namespace weightbroker {

class ReadDepth {
 public:
  // 1 <= first <= most. `first` is also the fewest.
  ReadDepth(int first, int most);

  int limit() const { return limit_; }      // for now
  int settled() const { return settled_; }  // the best so far
  int most() const { return most_; }

  // `now_ns` never goes back.
  void Completed(int64_t bytes, int64_t now_ns);

 private:
  void EndWindow(double bytes_per_ns);
  void EndSettledWindow(double bytes_per_ns);
  void StartTrial(int limit);
  void EndTrial();
  void MoveTo(int limit);
  int64_t ReadsOfWindow() const;

  const int fewest_;
  const int most_;
  int limit_;
  int settled_;              // the limit that holds: what `limit_` goes back to if what is tried is no better
  double settled_rate_ = 0;  // bytes a nanosecond at it; 0: not measured
  int tried_;                // the limit that is being tried, also in the window between; `settled_` if none is
  int wins_ = 0;             // of that trial
  int losses_ = 0;           // windows in a row, at the limit that holds, at less than half of its rate
  bool is_growing_ = true;   // until twice as many were no better
  bool tried_more_ = true;   // last, and not fewer
  int windows_between_tries_;
  int windows_until_try_ = 0;
  bool is_first_read_ = true;  // of a window: what it took began before the limit was this
  int64_t start_ns_ = 0;
  int64_t bytes_ = 0;
  int64_t reads_ = 0;
};

}  // namespace weightbroker
