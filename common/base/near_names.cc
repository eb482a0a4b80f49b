#include "common/base/near_names.h"

#include <algorithm>
#include <utility>

namespace weightbroker {

size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

std::vector<std::string> NearNames(const std::string& name, std::vector<std::string> known, size_t most) {
  std::vector<std::pair<size_t, size_t>> by_distance;  // and by place
  for (size_t i = 0; i < known.size(); ++i) by_distance.emplace_back(EditDistance(name, known[i]), i);
  std::sort(by_distance.begin(), by_distance.end());
  std::vector<std::string> near;
  for (size_t i = 0; i < std::min(most, by_distance.size()); ++i) {
    near.push_back(std::move(known[by_distance[i].second]));
  }
  return near;
}

}  // namespace weightbroker
