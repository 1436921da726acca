// A long random walk over the steps of the page table, each within its precondition: after every step the table is
// sound, and the piece is in the state that the step promises. Ends with exit status 0.
#include "pages/page_table.h"

#include <cstdio>
#include <cstdlib>
#include <random>

#include "base/errors.h"

using namespace ballonet;

namespace {

constexpr std::size_t kPieces = 7;
constexpr int kSteps = 200'000;
constexpr Target kTargets[] = {{3, LeadsTo::kDevice, Place::kDevice},
                               {4, LeadsTo::kHost, Place::kHost},
                               {5, LeadsTo::kPeer, Place::kPeer},
                               {6, LeadsTo::kAlias, Place::kHost}};

[[noreturn]] void die(const char* what, int step) {
  std::fprintf(stderr, "page_table: %s, after %d steps\n", what, step);
  std::exit(1);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  PageTable table;
  Stretch stretch(0x10000, kPieces);
  std::uint32_t ticket = 1;
  for (int step = 0; step < kSteps; ++step) {
    const std::size_t i = random() % kPieces;
    const Piece before = stretch[i];
    const std::uint64_t changes = table.changes();
    const unsigned dice = random() % 8;
    bool changes_it = true;  // so that whoever described the piece before knows
    if (before.leads_to == LeadsTo::kNone) {
      const Target target = kTargets[random() % 4];
      table.lead(stretch, i, target);
      if (stretch[i].leads_to != target.leads_to || stretch[i].open) die("a page was not led to", step);
      if (dice > 0) table.open(stretch, i);
    } else if (before.leads_to == LeadsTo::kRetiring) {
      const bool keepable = before.retiring_from == LeadsTo::kDevice && before.open;
      if (dice < 3) {
        table.revive(stretch, i);
        if (stretch[i].leads_to != before.retiring_from) die("a page came back as something else", step);
      } else if (dice < 6 && keepable) {
        table.keep(stretch, i, false);
      } else {
        table.clear(stretch, i);
        changes_it = false;
      }
    } else if (before.leads_to == LeadsTo::kKept) {
      dice < 4 ? table.claim(stretch, i) : table.clear(stretch, i);
      if (stretch[i].ahead) die("a page that was claimed or taken away is still ahead", step);
    } else if (dice < 2) {
      if (before.pins < 3) table.pin(stretch, i);
      changes_it = false;
    } else if (dice < 4 && before.pins > 0) {
      if (table.unpin(stretch, i) && before.doomed && !table.retire(stretch, i, ticket++)) {
        die("a piece was doomed and stayed when its last pin went", step);
      }
      changes_it = before.doomed && before.pins == 1;
    } else if (dice < 5) {
      if (table.retire(stretch, i, ticket++) != (before.pins == 0)) die("a pinned piece retired", step);
      if (before.pins > 0) table.spare(stretch, i);
    } else if (dice < 6 && before.leads_to == LeadsTo::kDevice && before.open && before.pins == 0) {
      table.keep(stretch, i, true);
    } else {
      for (Piece now = before; now.pins > 0; now = stretch[i]) table.unpin(stretch, i);
      table.clear(stretch, i);
    }
    if (changes_it != (stretch[i].changed > changes)) die("a change was not noted, or one that was none", step);
    if (table.ahead() != stretch.ahead()) die("the pages that were mapped ahead do not add up", step);
    try {
      PageTable::check(stretch);
    } catch (const InvariantBroken& broken) {
      die(broken.what(), step);
    }
  }
  return 0;
}
