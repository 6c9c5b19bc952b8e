// Kernels in which devices of several processes take part, by memory that these share.
//
// Every rank of a communicator has a board there, on which only it writes: messages to each other rank, and its parts of collectives. What
// is written there was begun, so the rules are those of exchange.h: a kernel is over when everybody it needs has begun, too.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exchange.h"
#include "operation.h"

namespace late {

// By which another process finds a board: a process, and the number of an open file in it.
struct Place {
  int process;
  int descriptor;
};

// Make this rank's board of a communicator, and map another one's.
Place make_board(const std::string& communicator, int rank, int size);
void map_board(const std::string& communicator, int other, Place place);

// One end of one message; `peer`: the rank within the communicator that has the other.
struct WiredMessage {
  int peer;
  bool sends;
  char* address;
  size_t nbytes;
};

// After `timeout_s` from now the watchdog ends this process (ProcessGroupNCCL.cpp, WorkNCCL::checkTimeout: from the time of issue).
Ending wired_exchange(int device, int stream, const std::string& communicator, const std::vector<WiredMessage>& messages,
                      const std::string& label, double timeout_s);
Ending wired_collective(int device, int stream, const Contribution& contribution, const std::string& label, double timeout_s);
void abort_wired(const std::string& communicator);

// Look for what others have begun. True where a kernel is over by that. Called with the machine's lock.
bool poll_wires();

// Let devices of this process work by themselves while its host neither waits for them nor gives them anything, as devices do, and watch
// time-outs. Once a process, after it was forked.
void work_by_themselves(int rank);
bool works_by_itself();
// A host has given them something, or waits for it.
void host_is_here();

}  // namespace late
