// GPI: the GPU writes one descriptor a message into a ring; no lock, no doorbell.
#pragma once
#include "transports/network.cuh"
#include "transports/ring_gfd.cuh"

namespace nvep {

template <class Partial>
using Gpi = Network<Partial, Unicast<GfdPoster>>;

}  // namespace nvep
