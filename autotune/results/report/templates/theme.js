(function(){try{var t=localStorage.getItem("autotune-theme");if(t)document.documentElement.dataset.theme=t}catch(e){}})()
