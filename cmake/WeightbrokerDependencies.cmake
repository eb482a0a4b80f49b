# Every library that the project stands on, found once.

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
# Module mode: Debian ships no config package for Protobuf, and FindProtobuf works with both.
find_package(Protobuf REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(OpenSSL REQUIRED COMPONENTS Crypto)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(CLI11 CONFIG REQUIRED)
find_package(liburing REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED COMPONENTS pull)
if(WEIGHTBROKER_BUILD_TESTS)
  find_package(GTest CONFIG REQUIRED)
endif()
