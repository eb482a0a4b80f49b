#include "tests/integration/versions/soak_series.h"

#include <cstdio>

namespace weightbroker::testing {

double Series::SlopeOfSecondHalf() const {
  const size_t begin = points_.size() / 2;
  const auto count = static_cast<double>(points_.size() - begin);
  double mean_cycle = 0;
  double mean_value = 0;
  for (size_t i = begin; i < points_.size(); ++i) {
    mean_cycle += points_[i].first / count;
    mean_value += points_[i].second / count;
  }
  double covariance = 0;
  double variance = 0;
  for (size_t i = begin; i < points_.size(); ++i) {
    covariance += (points_[i].first - mean_cycle) * (points_[i].second - mean_value);
    variance += (points_[i].first - mean_cycle) * (points_[i].first - mean_cycle);
  }
  return variance == 0 ? 0 : covariance / variance;
}

bool Series::Print(bool judged) const {
  const double slope = SlopeOfSecondHalf();
  const bool is_flat = slope <= bound_;
  printf("%-26s %14.0f to %14.0f, slope of the second half %10.4f a cycle", name_.c_str(),
         empty() ? 0 : points_.front().second, empty() ? 0 : last(), slope);
  if (judged) printf(" (at most %g)%s", bound_, is_flat ? "" : "  WRONG");
  printf("\n");
  return is_flat;
}

}  // namespace weightbroker::testing
