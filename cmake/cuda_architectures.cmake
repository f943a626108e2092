# SPDX-License-Identifier: Apache-2.0
# What an entry of CMAKE_CUDA_ARCHITECTURES stands for.

# Sets `result` to whether code for devices of `number` (90) is asked for by `architectures`: by name (90, 90-real,
# 90-virtual, 90a, ...), as all or all-major, or as native, where `native` has the devices of this machine.
function(stof_has_architecture number architectures native result)
  set(found FALSE)
  foreach(architecture IN LISTS architectures)
    if(architecture STREQUAL "native")
      stof_has_architecture(${number} "${native}" "" of_native)
      if(of_native)
        set(found TRUE)
      endif()
    elseif(architecture MATCHES "^${number}[af]?(-real|-virtual)?$" OR architecture MATCHES "^all(-major)?$")
      set(found TRUE)
    endif()
  endforeach()
  set(${result} ${found} PARENT_SCOPE)
endfunction()
