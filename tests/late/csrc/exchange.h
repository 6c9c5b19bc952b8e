// Kernels in which several devices take part, with the rules of NCCL's.
//
// A kernel begins when its stream comes to it, and holds that stream until everybody it needs has begun too: "the operation will block
// until all ranks have issued it" (NCCL User Guide, Using NCCL with CUDA; point-to-point communication: "all operations of a group are
// fused into one kernel").
#pragma once
#include <string>
#include <vector>

#include "operation.h"

namespace late {

// One end of one message: the n-th send of a channel meets the n-th receive of it.
struct Message {
  std::string channel;
  bool sends;
  char* address;
  size_t nbytes;
};

// Several messages of one communicator by one kernel: over when all of them are.
Ending exchange(int device, int stream, const std::vector<Message>& messages, const std::string& label);

// One rank's part of a collective. `kind`: broadcast, gather, sum, max or min; `root`: the only one that gets a result, or gives it; -1 for all.
struct Contribution {
  std::string communicator;
  int rank;
  int size;
  std::string kind;
  int root;
  char dtype;  // As Python's struct names it.
  const char* input;
  char* output;
  size_t nbytes;  // Of the input.
};
Ending collective(int device, int stream, const Contribution& contribution, const std::string& label);

// What all parts of one collective come to, by rank. Throws where they are not of one.
std::vector<char> result_of(const std::vector<Contribution>& parts);
// Whether its rank gets that.
bool takes_result(const Contribution& contribution);

// Nobody comes any more: what has not ended never will.
void forget_exchanges();
// A communicator is aborted: its kernels end, whatever they have done (ncclCommAbort).
void abort(const std::string& communicator);

}  // namespace late
