// A weight set as a broker would keep it, for tests.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "server/broker/vault.h"
#include "tests/unit/broker/fake_loader.h"

namespace weightbroker::testing {

// Of the model at "/models/m", as if its one file had been read; the spec's fingerprint is its own.
inline NewWeightSet MakeWeightSet(const std::string& torch_version = "2.11.0", int32_t rank_count = 1) {
  NewWeightSet set;
  set.spec.set_model("/models/m");
  set.spec.set_tensor_parallel_size(rank_count);
  set.environment.set_torch_version(torch_version);
  auto identity = std::make_shared<CheckpointIdentity>();
  identity->folder = "/models/m";
  identity->folder_stat = {
      .device = 1, .inode = 2, .size_bytes = 3, .mtime_ns = 4, .ctime_ns = 5, .is_directory = true};
  const FileStat file = {
      .device = 1, .inode = 7, .size_bytes = 8, .mtime_ns = 9, .ctime_ns = 10, .is_regular_file = true};
  identity->files.push_back(
      {.name = "model.safetensors", .stat = file, .contents_sha256 = {}, .header_sha256 = std::string(64, 'e')});
  set.fingerprint = ComputeFingerprint(set.spec, set.environment, *identity, HostDeviceFacts());
  set.identity = std::move(identity);
  set.placement = AllOnHost(rank_count);
  return set;
}

inline Residency MakeResidency() {
  return {.generation = 4,
          .register_time = std::chrono::system_clock::time_point(std::chrono::nanoseconds(1'700'000'000'123'456'789)),
          .resident_time = std::chrono::system_clock::time_point(std::chrono::nanoseconds(1'700'000'009'000'000'001)),
          .load_seconds = 8.9,
          .read_bytes = 512};
}

// With `tensor_count` tensors in one real, sealed slab.
inline std::shared_ptr<Shard> MakeKeptShard(int32_t rank, int tensor_count = 3) {
  FakeShard fake = MakeFakeShard(tensor_count);
  auto shard = std::make_shared<Shard>();
  shard->rank = rank;
  shard->slabs = {fake.sealed.slabs().begin(), fake.sealed.slabs().end()};
  ManifestFile manifest{std::move(fake.fds[1]), fake.sealed.manifest_bytes(), fake.sealed.manifest_sha256()};
  shard->manifest = Manifest::FromLoader(std::move(manifest), shard->slabs, tensor_count).value();
  fake.fds.pop_back();
  shard->slab_fds = std::make_shared<const std::vector<UniqueFd>>(std::move(fake.fds));
  shard->tensor_count = tensor_count;
  shard->size_bytes = shard->slabs[0].size_bytes();
  return shard;
}

}  // namespace weightbroker::testing
