// Kernels in which devices of several processes take part, through shared memory.
//
// Every rank of a communicator has a board there, to which only it writes: its messages to each other rank, and its parts of collectives.
// A board's entries have begun, so the rules are those of exchange.h: a kernel ends when all its peers have begun, too.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "exchange.h"
#include "operation.h"

namespace late {

// How another process finds a board: a process, and the number of an open file in it.
struct Place {
  int process;
  int descriptor;
};

// Make this rank's board of a communicator, and map another rank's.
Place make_board(const std::string& communicator, int rank, int size);
void map_board(const std::string& communicator, int other, Place place);

// One end of a message; `peer` is the rank of the other end in the communicator.
struct WiredMessage {
  int peer;
  bool sends;
  char* address;
  size_t nbytes;
};

// The watchdog ends this process `timeout_s` after the issue (ProcessGroupNCCL.cpp, WorkNCCL::checkTimeout).
Ending wired_exchange(int device, int stream, const std::string& communicator, const std::vector<WiredMessage>& messages,
                      const std::string& label, double timeout_s);
Ending wired_collective(int device, int stream, const Contribution& contribution, const std::string& label, double timeout_s);
void abort_wired(const std::string& communicator);

// Look for entries of other processes; true if a kernel ended. Called with the machine's lock.
bool poll_wires();

// Let the devices of this process work by themselves while its host neither waits for them nor issues operations, and watch time-outs.
// Call it once per process, after it was forked.
void work_by_themselves(int rank);
bool works_by_itself();
// Report that a host issues an operation or waits.
void host_is_here();

}  // namespace late
