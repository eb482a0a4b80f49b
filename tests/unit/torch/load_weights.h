// Weights of a small model, loaded from disk by the library in this process.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "tests/support/checkpoint_builder.h"
#include "tests/support/temporary_folder.h"
#include "weightbroker/client.h"

namespace weightbroker::testing {

// Ends the test program if it cannot: there is nothing left to test.
inline MappedWeights LoadWeights(const CheckpointBuilder& builder) {
  const TemporaryFolder folder;
  builder.Write(folder.path());
  ClientOptions options;
  options.torch_version = "any";
  WeightSpec spec;
  spec.model = folder.path();
  auto weights = Client::Create(options)->Attach(spec);
  if (!weights.ok()) {
    fprintf(stderr, "%s\n", weights.status().ToString().c_str());
    abort();
  }
  return *std::move(weights);
}

}  // namespace weightbroker::testing
