# SPDX-License-Identifier: Apache-2.0
# cmake -DNM=nm -DKERNELS=a.o|b.o|... -DOBJECTS=a.o|b.o|... -P: no two functions of the library share one symbol.
# Once, attention and packed GEMM of one instruction set had a function of one signature in one namespace. The linker kept
# one, and whether numbers were wrong depended on what the compiler inlined.
cmake_minimum_required(VERSION 3.24)

function(external_symbols object result)
  execute_process(COMMAND ${NM} --defined-only --extern-only --format=posix ${object} OUTPUT_VARIABLE symbols
                  COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" symbols "${symbols}")
  set(${result} "${symbols}" PARENT_SCOPE)
endfunction()

set(failures "")

# Kernels of an instruction set: X_kernels.cc exports the table X_kernels, and no function, weak symbols included.
string(REPLACE "|" ";" kernels "${KERNELS}")
if(kernels STREQUAL "")
  message(FATAL_ERROR "there are no objects of kernels")
endif()
foreach(object ${kernels})
  string(REGEX REPLACE "^.*/([a-z_0-9]+)\\.cc\\.[^/]*$" "\\1" table ${object})
  string(LENGTH ${table} length)
  external_symbols(${object} symbols)
  # GCC for AArch64 refers to the C++ runtime's handler of exceptions through this word, at -O0 in every object. It is data,
  # and the same in all.
  list(FILTER symbols EXCLUDE REGEX "^DW\\.ref\\.__gxx_personality_v0 V ")
  if(NOT symbols MATCHES "^_ZN4stof3cpu[0-9]+[a-z_0-9]+${length}${table}E [DR] [^;]*$")
    list(APPEND failures "${object} exports ${symbols}, expected ${table} alone")
  endif()
endforeach()

# Of all objects: no function is defined in one and inline in another.
string(REPLACE "|" ";" objects "${OBJECTS}")
foreach(object ${objects})
  external_symbols(${object} symbols)
  foreach(line ${symbols})
    if(NOT line MATCHES "^(_Z[A-Za-z0-9_.]+) ([A-Za-z])")
      continue()
    endif()
    set(symbol ${CMAKE_MATCH_1})
    if(CMAKE_MATCH_2 MATCHES "[WVu]")
      set(weak_${symbol} ${object})
    elseif(DEFINED strong_${symbol})
      list(APPEND failures "${symbol}: ${object} and ${strong_${symbol}} define it")
    else()
      set(strong_${symbol} ${object})
    endif()
    if(DEFINED weak_${symbol} AND DEFINED strong_${symbol})
      list(APPEND failures "${symbol}: defined by ${strong_${symbol}}, inline in ${weak_${symbol}}")
    endif()
  endforeach()
endforeach()
if(failures)
  list(JOIN failures "\n" text)
  message(FATAL_ERROR "${text}")
endif()
