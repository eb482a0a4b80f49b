// A figure that is read again and again, and by how much it goes up with each cycle in the end.
//
//   Series memory("broker's memory", "B");
//   memory.Add(cycle, bytes);                                  // many times
//   memory.SlopeOfSecondHalf()                                 // bytes a cycle
//
// Not thread-safe.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace weightbroker::testing {

class Series {
 public:
  Series(std::string name, double bound) : name_(std::move(name)), bound_(bound) {}

  void Add(double cycle, double value) { points_.emplace_back(cycle, value); }

  const std::string& name() const { return name_; }
  bool empty() const { return points_.empty(); }
  double last() const { return points_.back().second; }
  // From the first point to the last; 0 if there are none.
  double Cycles() const { return empty() ? 0 : points_.back().first - points_.front().first; }
  double Growth() const { return empty() ? 0 : points_.back().second - points_.front().second; }

  // By least squares over the second half of the points: what is taken once, at the start, does not count.
  double SlopeOfSecondHalf() const;

  // Prints first and last value and the slope; whether that is at most the bound. `judged` says whether it also says
  // so.
  bool Print(bool judged) const;

 private:
  std::string name_;
  double bound_;                                   // of the slope
  std::vector<std::pair<double, double>> points_;  // cycle and value
};

}  // namespace weightbroker::testing
