// GDAKI Free Flow: the GPU builds work-queue entries and marks them ready; a host thread rings the doorbell.
#pragma once
#include "transports/network.cuh"
#include "transports/ready_words.cuh"

namespace nvep {

template <class Partial>
using FreeFlow = Network<Partial, Unicast<QueuePoster<ReadyPublisher>>>;

}  // namespace nvep
