# SPDX-License-Identifier: Apache-2.0
# cmake -DINPUT=... -DOUTPUT=... -P embed_text.cmake: a file as a C++ string literal.
file(READ ${INPUT} _text)
file(WRITE ${OUTPUT} "R\"stof_text(${_text})stof_text\"\n")
