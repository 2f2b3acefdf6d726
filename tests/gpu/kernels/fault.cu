// Writes where nothing is mapped.
extern "C" __global__ void fault(const __grid_constant__ FaultArguments arguments) { *arguments.target = 1; }
