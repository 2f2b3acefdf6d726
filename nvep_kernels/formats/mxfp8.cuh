// mxfp8: e4m3 in blocks of 32 whose scales are powers of two.
#pragma once
#include "formats/fp8_block.cuh"

namespace nvep {

using PayloadMxfp8 = PayloadFp8Block<32, ScaleUe8m0>;

}  // namespace nvep
