// Exits with 0 if the library works as far as it can without a service.
#include <weightbroker/client.h>

#include <cstdio>

int main() {
  weightbroker::ClientOptions options;
  options.mode = weightbroker::Mode::kClient;
  options.torch_version = "any";
  options.socket_path = "/nonexistent/weightbroker.sock";
  const auto client = weightbroker::Client::Create(options);
  if (!client.ok()) return 1;
  weightbroker::AttachOptions attach;
  attach.fallback = weightbroker::Fallback::kFail;
  const auto weights = client->Attach(weightbroker::WeightSpec{"/models/none"}, attach);
  printf("%s\n", weights.status().ToString().c_str());
  return weights.status().reason() == "SERVICE_UNAVAILABLE" ? 0 : 1;
}
