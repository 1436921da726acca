// Fork: the child's pages are its own, and the device is closed to it.
//
// Note [Eager copies]. The pool's pages are shared mappings, so after a fork both processes would write into the same
// memory. A private mapping of the memfd is no cure: it shows the parent's later writes until the child writes itself.
// So the child copies every visible page before fork() returns in it, and the parent waits for that inside its own
// fork(), holding the lock: nothing is remapped meanwhile. Other threads of the parent go on, and so does a copy that
// is under way; what they write during that time may or may not be seen. Aliases part: two addresses of one page become
// two pages. What is idle (ballonet_standin_idle: free blocks of the caching allocator, pages that were given up) is
// not copied: the child has zeros there. Where RAM does not suffice for the copies the child's pages are inaccessible:
// a child that only calls exec does not notice, another faults rather than computing with its parent's later bytes.
//
// The pipe tells the parent that the child is done, or dead: it reads the end of file. Nothing here allocates, so that
// the child stays within what is allowed after a fork of a process with several threads.
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>

#include "ram.h"
#include "state.h"

namespace ballonet::standin {
namespace {

int done_pipe[2] = {-1, -1};

void close_both() {
  for (int& end : done_pipe) {
    if (end >= 0) ::close(end);
    end = -1;
  }
}

void before() {
  State& all = state();
  all.mutex.lock();  // kept until the fork is over, on both sides
  if (!all.forked && ::pipe2(done_pipe, O_CLOEXEC) != 0) done_pipe[0] = done_pipe[1] = -1;
}

void in_parent() {
  if (done_pipe[0] >= 0) {
    ::close(done_pipe[1]);
    done_pipe[1] = -1;
    char byte;
    while (::read(done_pipe[0], &byte, 1) < 0 && errno == EINTR) {
    }
  }
  close_both();
  state().mappings.no_longer_idle();
  state().mutex.unlock();
}

void in_child() {
  State& all = state();
  if (!all.forked) {
    all.forked = true;
    const bool parent_waits = done_pipe[0] >= 0;
    all.mappings.privatize(parent_waits && ram_available() > all.mappings.private_bytes() + ram_margin());
    close_both();
  }
  all.mutex.unlock();
}

}  // namespace

CUresult watch_forks() {
  static const int failed = ::pthread_atfork(before, in_parent, in_child);
  return failed == 0 ? CUresult{cuda::kSuccess} : refuse(cuda::kOutOfMemory, "cuInit: pthread_atfork failed");
}

}  // namespace ballonet::standin
