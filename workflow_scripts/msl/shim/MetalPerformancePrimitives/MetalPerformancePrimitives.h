// Every Core AI kernel includes this header and opens its namespace; its tensor operations have no stand-in.
#pragma once
#include <metal_stdlib>

namespace mpp::tensor_ops {}
