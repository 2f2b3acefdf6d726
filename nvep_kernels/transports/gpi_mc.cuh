// GPI-MC: one descriptor a token, which its consumer fans out to all far targets.
#pragma once
#include "transports/fanout.cuh"
#include "transports/network.cuh"

namespace nvep {

struct Multicast {
  using Poster = FanoutPoster;

  __device__ static void send_token(NetworkSender<FanoutPoster>& sender, const Route* routes, const Message& message) {
    const Step& step = sender.step;
    u32 far = 0;
    for (u32 j = 0; j < config::kMaxTargets && routes[j].target >= 0; ++j) {
      far += !is_near(step.rank, static_cast<u32>(routes[j].target));
    }
    if (far == 0) return;
    auto target = [&](u32 i) {
      u32 j = 0;
      for (u32 seen = 0;; ++j) {
        seen += !is_near(step.rank, static_cast<u32>(routes[j].target));
        if (seen == i + 1) break;
      }
      u32 rank = static_cast<u32>(routes[j].target);
      u64 slot = inbox_slot(step, rank, step.rank, static_cast<u32>(routes[j].slot));
      return FanoutTarget{rank, slot - step.arguments->peers[rank]};
    };
    FanoutPoster::put_all_by_warp(sender.ring_to(0), {far, message.bytes, kHeapHandle, message.from}, target,
                                  sender.waiter);
    __syncwarp();
  }
};

template <class Partial>
using GpiMc = Network<Partial, Multicast>;

}  // namespace nvep
