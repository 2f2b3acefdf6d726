// Shared memory of a block: NVEP_SHARED(Type, name) declares `Type& name`, uninitialised, one object per block and
// declaration. Type must be trivially constructible; all of a kernel's objects together take at most 48 KiB.
// NVEP_DYNAMIC_SHARED(name) declares `char* name`, 128-byte aligned: what the launch gave each block beyond that.
#pragma once

#ifdef NVEP_EMULATED
#include "emulator/fiber.h"

#define NVEP_SHARED(Type, name)                                                     \
  static_assert(__is_trivial(Type), #Type ": shared memory runs no constructor");   \
  static char name##_tag;                                                           \
  Type& name = *static_cast<Type*>(::nvep::emulated::current()->operations->shared( \
      ::nvep::emulated::current(), &name##_tag, sizeof(Type), alignof(Type)))
#define NVEP_DYNAMIC_SHARED(name) \
  char* name = static_cast<char*>(::nvep::emulated::current()->operations->dynamic_shared(::nvep::emulated::current()))
#else
#define NVEP_SHARED(Type, name)   \
  __shared__ Type name##_storage; \
  Type& name = name##_storage
#define NVEP_DYNAMIC_SHARED(name)                              \
  extern __shared__ __align__(128) char nvep_dynamic_shared[]; \
  char* name = nvep_dynamic_shared
#endif
