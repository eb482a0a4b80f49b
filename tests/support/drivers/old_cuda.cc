// A libcuda.so.1 of long ago: it says which it is, and has nothing that is needed.
extern "C" int cuDriverGetVersion(int* version) {
  *version = 10010;
  return 0;
}
