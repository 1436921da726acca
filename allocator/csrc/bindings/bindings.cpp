#include "bindings/bindings.h"

namespace ballonet {

Owner owner_named(const std::string& name) {
  if (name == "weights") return Owner::kWeights;
  if (name == "activations") return Owner::kActivations;
  if (name == "kv") return Owner::kKv;
  throw UsageError("an owner is 'weights', 'activations' or 'kv', not '" + name + "'");
}

Place place_named(const std::string& name) {
  if (name == "device") return Place::kDevice;
  if (name == "host") return Place::kHost;
  if (name == "peer") return Place::kPeer;
  throw UsageError("a place is 'device', 'host' or 'peer', not '" + name + "'");
}

const char* name_of(Place place) {
  constexpr const char* kNames[] = {"device", "host", "peer"};
  return kNames[static_cast<unsigned>(place)];
}

const char* name_of(Owner owner) {
  constexpr const char* kNames[] = {"free", "weights", "activations", "kv", "retiring"};
  return kNames[static_cast<unsigned>(owner)];
}

}  // namespace ballonet
