#include "common/load/not_finite.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/quote.h"

namespace weightbroker {

absl::Status WeightNotFinite(const TensorPlacement& tensor, int64_t element) {
  const int64_t columns = tensor.shape.back();
  const std::string row = absl::StrCat(element / columns);
  const std::string column = absl::StrCat(element % columns);
  return MakeError(Reason::kWeightNotFinite,
                   absl::StrCat("tensor ", Quote(tensor.name), " has a NaN or an infinity in row ", row, ", column ",
                                column, " of its shard, which FP8 blocks cannot hold: the checkpoint is damaged"),
                   {{"tensor", Printable(tensor.name)}, {"row", row}, {"column", column}});
}

}  // namespace weightbroker
