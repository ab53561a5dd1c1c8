# Fails if a level's object files define a symbol that the linker may merge with another level's of the same name: such a
# function, compiled for AVX-512, could then run on a machine without it. Everything there is to be in the level's own
# namespace, or inlined.
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND "${NM}" --defined-only "${object}" OUTPUT_VARIABLE symbols RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${NM} failed on ${object}")
  endif()
  string(REGEX MATCHALL "[0-9a-f]+ [Wu] [^\n]+" shared "${symbols}")
  if(shared)
    message(FATAL_ERROR "${object} shares with other levels: ${shared}")
  endif()
endforeach()
