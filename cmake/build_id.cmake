# SPDX-License-Identifier: Apache-2.0
# cmake -DROOT=... -DSOURCES=a;b -DOUTPUT=... -P build_id.cmake: a header with a hash over the library's sources, so that
# a library can be told from one that was built from other sources.
set(_all "")
foreach(_file IN LISTS SOURCES)
  file(SHA256 ${ROOT}/${_file} _hash)
  string(APPEND _all "${_file} ${_hash}\n")
endforeach()
string(SHA256 _hash "${_all}")
string(SUBSTRING ${_hash} 0 16 _id)
file(WRITE ${OUTPUT} "#define STOF_BUILD_ID \"${_id}\"\n")
