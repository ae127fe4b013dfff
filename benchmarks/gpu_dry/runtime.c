/* What torch asks of the CUDA runtime while tensors are fake: one H100, on which every call succeeds and does nothing.

   Loaded before the real runtime, whose other functions stay; none of these reads or writes memory of a device. */

#include <stddef.h>
#include <string.h>

/* The front of `struct cudaDeviceProp` in CUDA 13's driver_types.h; torch gives it zeros. */
struct properties {
    char name[256];
    char uuid[16];
    char luid[8];
    unsigned int luid_node_mask;
    size_t total_memory;
    size_t shared_per_block;
    int registers_per_block;
    int warp_size;
    size_t pitch;
    int threads_per_block;
    int threads[3];
    int grid[3];
    size_t constants;
    int major;
    int minor;
};

int cudaGetDeviceProperties(struct properties *found, int device) {
    (void)device;
    strcpy(found->name, "NVIDIA H100 80GB HBM3");
    found->total_memory = (size_t)80 << 30;
    found->shared_per_block = 48 << 10;
    found->registers_per_block = 65536;
    found->warp_size = 32;
    found->threads_per_block = 1024;
    found->major = 9;
    found->minor = 0;
    return 0;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) { (void)attribute, (void)device; *value = 0; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return 0; }
int cudaDeviceSynchronize(void) { return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { (void)flags; *event = (void *)1; return 0; }
int cudaEventDestroy(void *event) { (void)event; return 0; }
int cudaEventQuery(void *event) { (void)event; return 0; }
int cudaEventRecord(void *event, void *stream) { (void)event, (void)stream; return 0; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { (void)event, (void)stream, (void)flags; return 0; }
int cudaEventSynchronize(void *event) { (void)event; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaMemGetInfo(size_t *free, size_t *total) { *free = (size_t)79 << 30; *total = (size_t)80 << 30; return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaSetDevice(int device) { (void)device; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { (void)stream; *status = 0; return 0; }
int cudaStreamQuery(void *stream) { (void)stream; return 0; }
int cudaStreamSynchronize(void *stream) { (void)stream; return 0; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { (void)stream, (void)event, (void)flags; return 0; }
