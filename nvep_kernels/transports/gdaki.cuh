// GDAKI: the GPU builds work-queue entries, publishes them in order and rings the doorbell.
#pragma once
#include "transports/network.cuh"
#include "transports/ring_queue.cuh"

namespace nvep {

template <class Partial>
using Gdaki = Network<Partial, Unicast<QueuePoster<DoorbellPublisher>>>;

}  // namespace nvep
