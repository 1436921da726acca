// The page table: the states of each piece of addresses, and the only steps between them. Pure: no driver, no pool, no
// clock.
//
//         lead                  retire                clear
//   none ------> device, host, -------> retiring ------------> none
//     ^          peer or alias <-------    |
//     |           |      ^       revive    | keep, once it has passed (pages of the device)
//     | clear     |      | claim           v
//     +-----------+      +--------------- kept ----> none
//                                              clear
//
// Words
//   pin      a tensor made over the piece is alive; a pinned piece is not retired before its last pin goes
//   doomed   to be retired then
//   open     access was given; a page is mapped first and opened afterwards
//   ahead    kept because it was mapped before it was needed, and not claimed yet
//   changed  the number, in changes of the whole table, of the last one of this piece: an entry that was admitted at an
//            earlier number is out of date for it. A page that replaces another one with the same bytes is no change;
//            retiring is one, and its end is not
//
// Guarantees, which `check` verifies: an unbacked piece names no page, every other does; a kept one is open, of the
// device, and neither pinned nor doomed; a retiring one has a ticket; the counts are those of the pieces.
//
// Lock: the mapper's, held by the caller of everything here.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "driver/driver_abi.h"
#include "pages/page.h"

namespace ballonet {

struct Piece : Target {
  std::uint32_t ticket = 0;  // the retirement it waits in
  std::uint16_t pins = 0;
  LeadsTo retiring_from = LeadsTo::kNone;
  bool open = false;
  bool doomed = false;
  bool ahead = false;
  std::uint64_t changed = 0;
};

// A range's addresses, or a cached range's.
class Stretch {
 public:
  Stretch() = default;
  Stretch(CUdeviceptr base_, std::size_t pieces_) : base(base_), pieces(pieces_) {}

  // Unbacked beyond `size`: a heap's range is far longer than what it ever uses.
  const Piece& operator[](std::size_t piece) const { return piece < table_.size() ? table_[piece] : kUntouched; }
  std::size_t size() const { return table_.size(); }
  std::size_t count(LeadsTo leads_to) const { return counts_[static_cast<std::size_t>(leads_to)]; }
  std::size_t kept() const { return count(LeadsTo::kKept); }
  std::size_t ahead() const { return ahead_; }  // of the kept ones
  // Pieces that lead to a page that its owner has not given up.
  std::size_t backed() const;
  bool in_use() const { return backed() + count(LeadsTo::kRetiring) > 0; }

  CUdeviceptr base = 0;
  std::size_t pieces = 0;  // 0: the addresses were given to another stretch, or freed

 private:
  friend class PageTable;
  static const Piece kUntouched;
  std::vector<Piece> table_;
  std::array<std::size_t, kLeadsToCount> counts_{};  // but for those that are unbacked
  std::size_t ahead_ = 0;
};

class PageTable {
 public:
  std::uint64_t changes() const { return changes_; }
  std::size_t ahead() const { return ahead_; }  // of all stretches together

  // Pre: unbacked. Post: leads there, not open.
  void lead(Stretch& stretch, std::size_t piece, const Target& target);
  // Pre: not unbacked.
  void open(Stretch& stretch, std::size_t piece);
  // Pre: not unbacked. Post: unbacked; pins stay.
  void clear(Stretch& stretch, std::size_t piece);
  // Pre: leads somewhere. Post: retiring, or doomed where it is pinned: false.
  bool retire(Stretch& stretch, std::size_t piece, std::uint32_t ticket);
  // Pre: retiring. Post: the state before.
  void revive(Stretch& stretch, std::size_t piece);
  // Pre: an open page of the device, own or retiring, that is not in use.
  void keep(Stretch& stretch, std::size_t piece, bool ahead);
  // Pre: kept. Post: a page of the device.
  void claim(Stretch& stretch, std::size_t piece);
  // Keeps a piece that was mapped ahead like any other.
  void forget_ahead(Stretch& stretch, std::size_t piece);
  // Clears `doomed`: the piece is needed again.
  void spare(Stretch& stretch, std::size_t piece) { at(stretch, piece).doomed = false; }
  void pin(Stretch& stretch, std::size_t piece) { ++at(stretch, piece).pins; }
  // Is the last pin gone?
  bool unpin(Stretch& stretch, std::size_t piece) { return --at(stretch, piece).pins == 0; }
  // Undoes the changes of the piece since `then`, as its bytes are the same.
  void unchanged_since(Stretch& stretch, std::size_t piece, std::uint64_t then) { at(stretch, piece).changed = then; }

  // Throws InvariantBroken.
  static void check(const Stretch& stretch);

 private:
  static Piece& at(Stretch& stretch, std::size_t piece);
  void become(Stretch& stretch, Piece& piece, LeadsTo leads_to);

  std::uint64_t changes_ = 0;
  std::size_t ahead_ = 0;
};

}  // namespace ballonet
