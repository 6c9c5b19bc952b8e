// Kernels in which several devices take part, with NCCL's rules.
//
// A kernel begins when its stream reaches it, and blocks that stream until all its peers have begun, too: "the operation will block
// until all ranks have issued it" (NCCL User Guide, Using NCCL with CUDA; point-to-point communication: "all operations of a group are
// fused into one kernel").
#pragma once
#include <string>
#include <vector>

#include "operation.h"

namespace late {

// One end of a message: the n-th send of a channel meets its n-th receive.
struct Message {
  std::string channel;
  bool sends;
  char* address;
  size_t nbytes;
};

// Exchange several messages of one communicator in one kernel, which ends when all are done.
Ending exchange(int device, int stream, const std::vector<Message>& messages, const std::string& label);

// One rank's part of a collective. `kind`: broadcast, gather, sum, max or min. `root`: the rank that gives or gets the result; -1 for all.
struct Contribution {
  std::string communicator;
  int rank;
  int size;
  std::string kind;
  int root;
  char dtype;  // As in Python's struct.
  const char* input;
  char* output;
  size_t nbytes;  // Of the input.
};
Ending collective(int device, int stream, const Contribution& contribution, const std::string& label);

// The result of all parts of a collective, by rank. Throws if they do not match.
std::vector<char> result_of(const std::vector<Contribution>& parts);
// Whether the contribution's rank gets the result.
bool takes_result(const Contribution& contribution);

// Forget all exchanges; those that have not ended never will.
void forget_exchanges();
// Abort a communicator: its kernels end, whatever they have done (ncclCommAbort).
void abort(const std::string& communicator);

}  // namespace late
