// fp16 rows: beyond 65,504 infinite.
#pragma once
#include "formats/bf16.cuh"

namespace nvep {

using PayloadFp16 = Payload16<ElementsFp16>;

}  // namespace nvep
