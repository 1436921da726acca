// Enums for pages and pieces: owner, place, what a piece leads to.
//
// Lock: none; these are values.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ballonet {

using PageId = std::uint32_t;  // within the pool of its place
constexpr PageId kNoPage = ~PageId{0};

enum class Owner : std::uint8_t { kFree, kWeights, kActivations, kKv, kRetiring };
constexpr std::size_t kOwners = 5;

enum class Place : std::uint8_t { kDevice, kHost, kPeer };

//   none      nothing: the addresses are inaccessible
//   device    a page of its own there; host, peer: likewise (see Note [Peer pages] in context.h)
//   alias     the page of another range
//   retiring  a page that its owner has given up, still mapped until every stream has passed
//   kept      a free page: a mapping of the piece claims it with no driver call; threads that need pages take it away
enum class LeadsTo : std::uint8_t { kNone, kDevice, kHost, kPeer, kAlias, kRetiring, kKept };
constexpr std::size_t kLeadsToCount = 7;

// What a piece with a page of its own in a place leads to.
constexpr LeadsTo own_page_in(Place place) {
  return place == Place::kDevice ? LeadsTo::kDevice : place == Place::kHost ? LeadsTo::kHost : LeadsTo::kPeer;
}
constexpr bool has_own_page(LeadsTo leads_to) {
  return leads_to == LeadsTo::kDevice || leads_to == LeadsTo::kHost || leads_to == LeadsTo::kPeer;
}
// Is there a page behind the piece that its owner has not given up?
constexpr bool leads_somewhere(LeadsTo leads_to) { return has_own_page(leads_to) || leads_to == LeadsTo::kAlias; }

// A page that a piece leads to, or is to lead to.
struct Target {
  PageId page = kNoPage;
  LeadsTo leads_to = LeadsTo::kNone;
  Place place = Place::kDevice;  // of the page
};

}  // namespace ballonet
