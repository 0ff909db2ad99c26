// Address spaces of the language as macros; defined only after every C++ header. `threadgroup` stands for storage
// or for a pointer's qualifier, decided for each occurrence (MSL_TG_1, MSL_TG_2, ... in the generated launcher).
#define device
#define thread
#define constant const
#define kernel
#define MSL_JOIN_(a, b) a##b
#define MSL_JOIN(a, b) MSL_JOIN_(a, b)
#define threadgroup MSL_JOIN(MSL_TG_, __COUNTER__)
#if defined(__APPLE__)
#define MSL_STORAGE static __attribute__((section("__DATA,msltg")))
#else
#define MSL_STORAGE static __attribute__((section("msltg")))
#endif
