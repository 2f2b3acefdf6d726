#include "emulator/context.h"

#include "emulator/sanitizers.h"

#include <stdint.h>
#include <string.h>

#if defined(__APPLE__)
#define NVEP_SYMBOL "_nvep_switch"
#else
#define NVEP_SYMBOL "nvep_switch"
#endif

#if !defined(NVEP_USE_UCONTEXT) && (defined(__x86_64__) || defined(__aarch64__))

extern "C" void nvep_switch(void** from, void* to);

#if defined(__x86_64__)

// Callee-saved registers and both floating-point control words; the return address is already on the stack.
asm(".text\n"
    ".globl " NVEP_SYMBOL "\n" NVEP_SYMBOL
    ":\n"
    "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
    "  subq $8, %rsp\n  stmxcsr (%rsp)\n  fnstcw 4(%rsp)\n"
    "  movq %rsp, (%rdi)\n"
    "  movq %rsi, %rsp\n"
    "  ldmxcsr (%rsp)\n  fldcw 4(%rsp)\n  addq $8, %rsp\n"
    "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
    "  retq\n");

namespace nvep {
namespace emulated {

Context context_prepare(char*, char* top, void (*entry)()) {
  uint64_t* sp = reinterpret_cast<uint64_t*>(top);
  *--sp = 0;  // return address of `entry`: where a debugger stops unwinding
  *--sp = reinterpret_cast<uint64_t>(entry);
  for (int i = 0; i < 6; ++i) *--sp = 0;
  const uint32_t control[2] = {0x1f80, 0x037f};  // mxcsr, x87 control word
  memcpy(--sp, control, sizeof(control));
  return sp;
}

}  // namespace emulated
}  // namespace nvep

#else  // aarch64

// x19-x30, d8-d15 and fpcr; returning through x30 continues the other stack.
asm(".text\n"
    ".p2align 2\n"
    ".globl " NVEP_SYMBOL "\n" NVEP_SYMBOL
    ":\n"
    "  sub sp, sp, #176\n"
    "  stp x19, x20, [sp, #0]\n  stp x21, x22, [sp, #16]\n  stp x23, x24, [sp, #32]\n"
    "  stp x25, x26, [sp, #48]\n  stp x27, x28, [sp, #64]\n  stp x29, x30, [sp, #80]\n"
    "  stp d8, d9, [sp, #96]\n  stp d10, d11, [sp, #112]\n  stp d12, d13, [sp, #128]\n  stp d14, d15, [sp, #144]\n"
    "  mrs x9, fpcr\n  str x9, [sp, #160]\n"
    "  mov x9, sp\n  str x9, [x0]\n"
    "  mov sp, x1\n"
    "  ldr x9, [sp, #160]\n  msr fpcr, x9\n"
    "  ldp x19, x20, [sp, #0]\n  ldp x21, x22, [sp, #16]\n  ldp x23, x24, [sp, #32]\n"
    "  ldp x25, x26, [sp, #48]\n  ldp x27, x28, [sp, #64]\n  ldp x29, x30, [sp, #80]\n"
    "  ldp d8, d9, [sp, #96]\n  ldp d10, d11, [sp, #112]\n  ldp d12, d13, [sp, #128]\n  ldp d14, d15, [sp, #144]\n"
    "  add sp, sp, #176\n"
    "  ret\n");

namespace nvep {
namespace emulated {

Context context_prepare(char*, char* top, void (*entry)()) {
  uint64_t* sp = reinterpret_cast<uint64_t*>(top) - 22;
  memset(sp, 0, 176);
  sp[11] = reinterpret_cast<uint64_t>(entry);
  return sp;
}

}  // namespace emulated
}  // namespace nvep

#endif

namespace nvep {
namespace emulated {

NVEP_SWITCHES void context_switch(Context* from, Context to) {
  nvep_switch(from, to);
}

}  // namespace emulated
}  // namespace nvep

#else  // ucontext

#include <ucontext.h>

namespace nvep {
namespace emulated {

Context context_prepare(char* bottom, char* top, void (*entry)()) {
  top -= (sizeof(ucontext_t) + 63) & ~static_cast<uintptr_t>(63);
  ucontext_t* context = reinterpret_cast<ucontext_t*>(top);
  getcontext(context);
  context->uc_stack.ss_sp = bottom;
  context->uc_stack.ss_size = static_cast<size_t>(top - bottom);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

// `*from` names where to save: a fiber's own record, or for the scheduler a record on its stack.
void context_switch(Context* from, Context to) {
  ucontext_t here;
  ucontext_t* const target = static_cast<ucontext_t*>(to);
  *from = &here;
  swapcontext(&here, target);
}

}  // namespace emulated
}  // namespace nvep

#endif
