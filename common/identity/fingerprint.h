// The identity of a weight set: a SHA-256 over the canonical form of spec, environment and what is in the files.
//
//   ASSIGN_OR_RETURN(auto identity, ReadCheckpointIdentity(file_system, folder));   // config and headers; no weights
//   const Fingerprint wanted = ComputeFingerprint(spec, environment, identity, HostDeviceFacts());
//   for (const auto& difference : DiffFingerprints(wanted, resident)) ...           // every field, both values
//
// The canonical form is described in docs/fingerprint-format.md. Neither the rank nor the folder's path is part of it:
// the same files are the same weights, whatever leads to them. Thread-safe: all functions are pure.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/identity/checkpoint_identity.h"
#include "weightbroker/v1/types.pb.h"

namespace weightbroker {

// What the service knows of the devices that hold the weights, by field name; for host memory
// {"device.compute_capability": "none", ...}.
using DeviceFacts = std::map<std::string, std::string>;
DeviceFacts HostDeviceFacts();
// Of a GPU: "9.0" and "580.159.03", as NVML says them.
DeviceFacts GpuDeviceFacts(const std::string& compute_capability, const std::string& driver_version);

struct Fingerprint {
  std::string hash;                               // 64 lower-case hexadecimal digits
  std::map<std::string, std::string> components;  // field -> canonical value; what the hash is over
};

// The spec must be complete (see CompleteSpec) and the environment checked (see CheckEnvironment). `architectures` is
// what HashArchitectures gives for the files that say how to split besides those that are built in.
Fingerprint ComputeFingerprint(const v1::WeightSpec& spec, const v1::Environment& environment,
                               const CheckpointIdentity& identity, const DeviceFacts& device_facts,
                               const std::string& architectures = {});

// The SHA-256 over architecture files, file name to contents; empty if there are none.
std::string HashArchitectures(const std::map<std::string, std::string>& texts);

// What of its components is a device's facts.
DeviceFacts DeviceFactsOf(const Fingerprint& fingerprint);

// The SHA-256 over the canonical text of `components`: what ComputeFingerprint puts into `hash`.
std::string HashComponents(const std::map<std::string, std::string>& components);

// ENVIRONMENT_REQUIRED if a part is missing; INVALID_ARGUMENT if one is over-long or has other than printable ASCII.
absl::Status CheckEnvironment(const v1::Environment& environment);

// Every field in which they differ, sorted; empty if the hashes are equal.
std::vector<v1::FingerprintDifference> DiffFingerprints(const Fingerprint& requested, const Fingerprint& resident);

}  // namespace weightbroker
