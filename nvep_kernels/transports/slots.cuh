// What D.send knows of a token, and keeps for C.recv.
#pragma once
#include "protocols/lane.cuh"

namespace nvep {

// The targets of a token, ascending, and its slot at each; a target below 0 ends the list.
struct alignas(8) Route {
  i32 target;
  i32 slot;
};

// Global ids of a token, held by one thread.
struct TokenIds {
  i32 id[config::kTopK];
};

}  // namespace nvep
