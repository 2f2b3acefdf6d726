// Switching between stacks: assembly for x86-64 and aarch64, `ucontext` (a system call per switch) elsewhere or with
// NVEP_USE_UCONTEXT. A context is one pointer, valid while its stack is not running.
#pragma once

namespace nvep {
namespace emulated {

using Context = void*;

// Prepares a stack that grows down from `top` (16-byte aligned) to `bottom` to start in `entry`, which never returns.
// Rounding and denormal handling start in the default mode, whatever the launching thread uses.
Context context_prepare(char* bottom, char* top, void (*entry)());

// Saves the running stack in *from and continues `to`.
void context_switch(Context* from, Context to);

}  // namespace emulated
}  // namespace nvep
