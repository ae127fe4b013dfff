/* libcuda.so.1 for autograd's engine, which asks whether a device was begun upon; none was. */

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    (void)device;
    *flags = 0;
    *is_active = 0;
    return 0;
}
